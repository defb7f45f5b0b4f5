"""Bad days, many of them: campaigns whose figures are in docs/reliability.md (`python -m tests.reliability`)."""
