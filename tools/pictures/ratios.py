"""What a bench without a picture of its own gets: ratios over rows, a panel for each group and peer."""

import re
from typing import Any

from pictures import panels
from pictures.panels import Panel


def picture(payload: dict[str, Any], path: str) -> None:
    found: dict[tuple[str, str], Panel] = {}
    for row in panels.timed(payload):
        group = row.get("group", payload["name"])
        panel = found.setdefault((group, row["peer"]), Panel(f"{group}, against {row['peer']}", "rows"))
        panel.add(re.sub(r" M=\d+$", "", row["case"]), row["shape"][0], row["ratio"])
    panels.draw(found.values(), path)
