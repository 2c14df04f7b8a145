"""A module whose import ends the program."""

raise SystemExit("not for you")
