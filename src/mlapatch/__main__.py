"""`python -m mlapatch`."""

from mlapatch.cli import main

if __name__ == "__main__":
    main()
