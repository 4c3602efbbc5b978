"""The subcommands of `piecegraph cache`, one per file, and the code they share."""
