noted_fills = []


def note_fill(backend):
    """Remember who asked."""
    noted_fills.append(type(backend).__name__)
