"""mlapatch: named, reversible, verified source patches for an installed SGLang's flashinfer MLA backend."""

__version__ = "0.1.0"
