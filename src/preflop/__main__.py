"""`python -m preflop` is the command `preflop`."""

from preflop.cli.main import main

if __name__ == "__main__":
    main()
