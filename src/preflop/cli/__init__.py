"""The command: one module per subcommand, each with one function `command`.

May import everything; computes nothing: it calls library functions and hands what they return to
`report`. A module of this room imports only light things at its top, so that the commands that need no
torch start quickly.
"""
