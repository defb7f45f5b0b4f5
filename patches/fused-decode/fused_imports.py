import functools
from typing import NamedTuple
