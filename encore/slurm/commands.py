"""Wrappers for Slurm's command-line programs. Failures become errors with a hint."""

import contextlib
import re
import shutil
import subprocess

from encore.errors import EncoreError

# The controller answers in milliseconds; give up after this time without an answer.
CALL_SECONDS = 30.0

HINTS = (
    ("configuration source", "run this on a login node of the cluster, or set SLURM_CONF to its slurm.conf"),
    ("Unable to contact slurm controller", "the controller does not answer: contact the administrator"),
    ("Invalid job id", "look at your jobs with: encore status"),
    ("invalid partition", "see the partitions with: sinfo"),
    ("Invalid account", "see your accounts with: sacctmgr show associations user=$USER"),
    ("Requested reservation is invalid", "see the reservations with: scontrol show reservation"),
    ("Job dependency problem", "such as --dependency afterok:12; see dependency in sbatch(1)"),
    ("Invalid qos", "list the allowed ones with: sacctmgr show associations user=$USER"),
    ("More processors requested than permitted", "request fewer nodes or GPUs"),
    (
        "Requested node configuration is not available",
        "list the resources of the nodes with: sinfo --format='%P %D %c %G'",
    ),
    ("Node count specification invalid", "list the nodes with: sinfo"),
    ("Requested time limit is invalid", "request less time: --time; see the limits with: sinfo"),
    ("Access/permission denied", "only the job's owner and operators may do this"),
)


def is_installed() -> bool:
    return shutil.which("sbatch") is not None


def require() -> None:
    if not is_installed():
        raise EncoreError(
            "no Slurm here: sbatch is not on PATH",
            expected="a login node of a Slurm cluster",
            hint="on one machine: encore run BENCHMARK GPUS; to see the script: --dry-run",
        )


def call(*command: str) -> str:
    """Return a Slurm program's standard output. Raise EncoreError with its error message."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CALL_SECONDS,
            check=False,
        )
    except FileNotFoundError as error:
        require()
        raise EncoreError(f"{command[0]} is not on PATH", hint="install Slurm's client programs") from error
    except subprocess.TimeoutExpired as error:
        raise EncoreError(
            f"{command[0]} did not answer within {CALL_SECONDS:g} s",
            hint="is the controller up? scontrol ping",
        ) from error
    if done.returncode != 0:
        raise explain(command[0], done.stderr or done.stdout)
    return done.stdout


def explain(program: str, stderr: str) -> EncoreError:
    """Convert a program's error output to an error with one line and a hint."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()] or ["no reason given"]
    message = next((line for mark in ("fatal: ", "error: ") for line in lines if mark in line), lines[0])
    hint = next((text for symptom, text in HINTS if symptom in stderr), "")
    return EncoreError(f"{program}: {re.sub(r'^.*?(fatal|error): ', '', message)}", hint=hint)


def parse_seconds(time: str) -> float | None:
    """Parse ``4:05``, ``1:04:05`` or ``2-01:04:05`` into seconds; None for other formats."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", time)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def show_job(job: str) -> dict[str, str]:
    """Return the fields of ``scontrol show job``; empty if the controller has forgotten the job."""
    try:
        text = call("scontrol", "--oneliner", "show", "job", job)
    except EncoreError:
        return {}
    pairs = (word.partition("=") for word in text.split())
    return {name: value for name, separator, value in pairs if separator}


def setting(name: str) -> str:
    """Return a value of the Slurm configuration, such as TaskPlugin; empty without Slurm."""
    text = ""
    # A dry run must work on any machine, even if Slurm is installed but not configured.
    with contextlib.suppress(EncoreError):
        text = call("scontrol", "show", "config")
    match = re.search(rf"^{name}\s*=\s*(\S+)", text, re.MULTILINE)
    return match.group(1) if match else ""
