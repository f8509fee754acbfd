"""What people see: tables, terminal, JSON, page and pictures, all from the account's dataclasses.

May import: account (its dataclasses), tape, ledgers (to read), hardware, timing, units, errors, files.
Never torch.
Does not belong here: adding anything up (ledgers, accounting), reading the command line (cli).
"""
