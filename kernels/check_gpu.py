"""Checks every kernel against its reference on this machine's GPU and times it; writes JSON.

Run:     python kernels/check_gpu.py --out kernels/results/h200.json
Output:  one line per case: microseconds, the PyTorch baseline's, the floor, the error.
Time:    under ten minutes; cases that would start after --limit-s seconds are listed as not run.
Without a GPU it stops, unless --tiny runs the same cases at a tiny shape on the CPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from dspark_kernels.testing.ops import OPS
from dspark_kernels.testing.timing import Case, measure

KERNELS = Path(__file__).parent


def main() -> int:
    """Run the shape tests, then the benchmark cases; return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=KERNELS / "results" / "gpu.json")
    parser.add_argument("--limit-s", type=float, default=540.0, help="start no case after this")
    parser.add_argument("--no-tests", action="store_true", help="skip the tables of small shapes")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("a CUDA or ROCm GPU must be present; got none. Use --tiny to try the script.")
    start = time.monotonic()
    report: dict[str, Any] = {"machine": describe(device), "tests": None, "cases": []}
    if not (options.no_tests or options.tiny):
        report["tests"] = run_tests(options.limit_s / 2)
        print(report["tests"]["summary"])
    for op in OPS:
        bench = importlib.import_module(f"dspark_kernels.{op}.bench_{op}")
        report["cases"] += run_op(op, bench, device, start + options.limit_s)
    report["seconds"] = round(time.monotonic() - start, 1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    failed = [case for case in report["cases"] if not case["ok"]]
    print(f"{len(report['cases'])} cases, {len(failed)} wrong or not run; {options.out}")
    return 1 if failed or (report["tests"] and report["tests"]["status"]) else 0


def describe(device: str) -> dict[str, str]:
    """Return what was measured on."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    triton = sys.modules.get("triton") or (importlib.import_module("triton") if name else None)
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": getattr(triton, "__version__", "none"),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def run_tests(limit_s: float) -> dict[str, Any]:
    """Run the kernels' own tests on the GPU in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(KERNELS)]
    try:
        done = subprocess.run(  # noqa: S603 - this Python, on this repository's tests
            command,
            cwd=KERNELS.parent,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"status": 1, "summary": f"tests did not end in {limit_s:.0f} s"}
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-500:]]
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"status": done.returncode, "summary": lines[-1], "failures": failures}


def run_op(op: str, bench: Any, device: str, deadline: float) -> list[dict[str, Any]]:
    """Check and time an op's cases; an exception in one is recorded, not raised."""
    found = []
    try:
        cases = bench.cases(device)
    except Exception as error:  # noqa: BLE001 - the other ops must still run
        return [{"op": op, "case": "all", "ok": False, "error": repr(error)[:500]}]
    for case in cases:
        record: dict[str, Any] = {"op": op, "case": case.name, "ok": False}
        if time.monotonic() > deadline:
            record["error"] = "not run: out of time"
        else:
            try:
                record |= run_case(case, device)
            except Exception as error:  # noqa: BLE001 - as above
                record["error"] = repr(error)[:500]
        print(json.dumps(record))
        found.append(record)
    return found


def run_case(case: Case, device: str) -> dict[str, Any]:
    """Check first: no time is reported for a wrong result."""
    deviation = case.check()
    if not deviation <= case.bound:
        return {"deviation": deviation, "bound": case.bound, "error": "wrong result, not timed"}
    ours, base = measure(case.run, device), measure(case.baseline, device)
    return {
        "ok": True,
        "deviation": deviation,
        "bound": case.bound,
        "us": round(ours.median_us, 2),
        "us_20_80": [round(ours.low_us, 2), round(ours.high_us, 2)],
        "baseline": case.baseline_name,
        "baseline_us": round(base.median_us, 2),
        "floor_us": round(case.floor_us, 2),
    }


if __name__ == "__main__":
    sys.exit(main())
