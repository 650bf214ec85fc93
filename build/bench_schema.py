"""Write client/bench/report.schema.json, the JSON Schema of what `tritone bench --json` writes.

python build/bench_schema.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tritone_bench.document import json_schema

SCHEMA = Path(__file__).parents[1] / "client" / "bench" / "report.schema.json"


def schema() -> str:
    """The whole file."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write client/bench/report.schema.json.")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    if parser.parse_args().check:
        return int(SCHEMA.read_text(encoding="utf-8") != schema())
    SCHEMA.write_text(schema(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
