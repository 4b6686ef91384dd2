"""The command `moejax`: one file per subcommand, each with run(words) and its help text as docstring."""
