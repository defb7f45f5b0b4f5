"""`verify`: does the patched backend compute what the stock one computes?"""

from mlapatch.verify.runner import Job, Report, ScenarioResult, run_job, scenario_names

__all__ = ["Job", "Report", "ScenarioResult", "run_job", "scenario_names"]
