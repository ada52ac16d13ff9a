"""`python -m accelerate` is `accelerate`, of this very Python."""

from accelerate.commands.accelerate_cli import main

if __name__ == "__main__":
    main()
