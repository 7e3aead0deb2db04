"""Measure how often Encore's additional rules fire on public logs that pass mlperf-logging's checker.

    python -m tools.check_rates training_results_v0.5 ... training_results_v5.1

writes encore/results/data/check_rates.json. DIR: checkout of a round. v0.5 has no other checker: there,
all logs that reached their target count.
"""

import json
from collections import Counter

from encore.results.compliance.compliance import read_and_check
from encore.results.compliance.official import TARGET_NOT_MET
from encore.results.findings import ComplianceReport, file_of
from encore.results.logs.parallel import map_files
from encore.results.logs.run_log import RunLog
from encore.results.scores.score import find_sets
from tools import Folders, run

EXAMPLES = 3


def accepted(run: RunLog, report: ComplianceReport) -> bool:
    # Whether the log passes without the additional rules
    if report.ruleset in (None, "0.5.0"):
        return run.converged
    findings = (finding for finding in report.findings if finding.code in ("", TARGET_NOT_MET))
    return not any(finding.severity == "error" for finding in findings)


def codes_of(report: ComplianceReport) -> set[str]:
    return {finding.code for finding in report.findings} - {"", TARGET_NOT_MET}


def main(folders: Folders) -> None:
    sets = logs = 0
    fired: dict[str, list[str]] = {}
    files: Counter[str] = Counter()
    # By round: number of logs, of logs that pass mlperf-logging's checker (v0.5: that reached the target), of logs that
    # pass here; for differences, the codes of our errors
    rounds: dict[str, tuple[Counter[str], Counter[str]]] = {}
    for folder in folders:
        listed = list(find_sets(folder))
        results = map_files(read_and_check, [file for _, paths_of_set in listed for file in paths_of_set])
        none = Counter(logs=0, official=0, ours=0), Counter[str]()
        verdicts, differ = rounds.setdefault(folder.name.rpartition("_")[2], none)
        for folder_of_set, paths_of_set in listed:
            sets, logs = sets + 1, logs + len(paths_of_set)
            codes: Counter[str] = Counter()
            for log, report in (next(results) for _ in paths_of_set):
                good = accepted(log, report)
                codes.update(codes_of(report) if good else ())
                verdicts.update({"logs": 1, "official": int(good), "ours": int(report.passed)})
                if good != report.passed:
                    errors = {finding.code for finding in report.findings if finding.severity == "error"}
                    differ[" and ".join(sorted(errors)) or "ours passes"] += 1
            for code, count in codes.items():
                fired.setdefault(code, []).append(f"{folder.name}/{folder_of_set.relative_to(folder).as_posix()}")
                files[code] += count
        print(folder.name, dict(verdicts), dict(differ), flush=True)
    rules = {
        code: {"sets": len(set_names), "logs": files[code], "examples": set_names[:EXAMPLES]}
        for code, set_names in sorted(fired.items())
    }
    content = {
        "from": [folder.name for folder in folders],
        "sets": sets,
        "logs": logs,
        "rules": rules,
        "rounds": {name: {**verdicts, "differ": dict(differ)} for name, (verdicts, differ) in rounds.items()},
    }
    file_of("check").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    print(f"{sets} sets, {logs} logs")


if __name__ == "__main__":
    run(main, __doc__)
