"""One file a verb: a plain function with typed keyword arguments that returns an Outcome."""
