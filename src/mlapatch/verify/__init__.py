"""`verify`: does the patched backend compute what the stock one computes?"""

from mlapatch.verify.runner import Job, ScenarioResult, run_job

__all__ = ["Job", "ScenarioResult", "run_job"]
