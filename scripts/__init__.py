"""Entry points: the `draftsmith` command and its subcommands."""
