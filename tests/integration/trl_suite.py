"""TRL's own GRPO tests with TRL's trainer and then with ours; prints where they differ.

    python tests/integration/trl_suite.py PATH_TO_TRL_CHECKOUT [arguments for pytest]

The checkout should be of the installed version of TRL (its tests are not in the package). The
tests load `trl-internal-testing/...` from the hub, or from folders of that name in the current
directory. Exit code 1 if a test that passes with TRL's trainer does not pass with ours.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

_SWITCH = "TRL_SUITE_TRAINER"


def pytest_configure() -> None:
    """As a pytest plugin: put our classes in place of TRL's before its tests import them."""
    if os.environ.get(_SWITCH) == "ours":
        import trl

        from infinite_sampling.trl import InfiniteGRPOConfig, InfiniteGRPOTrainer

        trl.GRPOTrainer, trl.GRPOConfig = InfiniteGRPOTrainer, InfiniteGRPOConfig


def outcomes(checkout: Path, trainer: str, arguments: list[str]) -> dict[str, str]:
    """The outcome of each test by name: passed, failed or skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "pytest", str(checkout / "tests" / "test_grpo_trainer.py"), "-q", "--tb=short"]
        command += [f"--rootdir={checkout}", f"--junitxml={report}", "-p", "trl_suite", "-p", "no:cacheprovider"]
        subprocess.run([*command, *arguments], env={**os.environ, "PYTHONPATH": path, _SWITCH: trainer}, check=False)
        if not report.is_file():
            raise SystemExit(f"no test of {checkout} ran with {trainer}: see pytest's output above")
        cases = ElementTree.parse(report).iter("testcase")
        return {f"{case.get('classname')}.{case.get('name')}": _outcome(case) for case in cases}


def _outcome(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def main() -> int:
    """Run both and print the table."""
    if len(sys.argv) < 2 or not (Path(sys.argv[1]) / "tests" / "test_grpo_trainer.py").is_file():
        raise SystemExit(f"usage: {sys.argv[0]} PATH_TO_TRL_CHECKOUT [arguments for pytest]")
    checkout, arguments = Path(sys.argv[1]).resolve(), sys.argv[2:]
    theirs, ours = (outcomes(checkout, trainer, arguments) for trainer in ("theirs", "ours"))
    print(f"TRL's trainer: {dict(Counter(theirs.values()))}")
    print(f"ours:          {dict(Counter(ours.values()))}")
    different = {name: (theirs[name], ours.get(name, "absent")) for name in theirs if ours.get(name) != theirs[name]}
    for name, (expected, got) in different.items():
        print(f"  {name}: {expected} with TRL's, {got} with ours")
    return int(any(expected == "passed" for expected, _ in different.values()))


if __name__ == "__main__":
    raise SystemExit(main())
