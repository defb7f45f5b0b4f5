"""`verify`: does the patched backend compute what the stock one computes?"""

from mlapatch.verify.runner import Job, ScenarioResult, run_job, scenario_names

__all__ = ["Job", "ScenarioResult", "run_job", "scenario_names"]
