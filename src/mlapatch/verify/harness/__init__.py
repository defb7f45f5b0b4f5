"""Runs a stock and a patched flashinfer MLA backend side by side, in the interpreter that SGLang uses.

This package is put on the path of another Python, which may not have mlapatch: it imports the standard library, torch
and triton only.
"""
