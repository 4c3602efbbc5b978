"""The subcommands of `piecegraph cache`, one a file, and what they share."""
