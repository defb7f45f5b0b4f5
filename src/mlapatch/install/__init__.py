"""The only place that knows pip, uv, git, RECORD and .pyc files, and the only writer."""
