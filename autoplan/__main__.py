"""`python -m autoplan`."""

from autoplan.cli.app import main

if __name__ == "__main__":
    main()
