"""What the study of servers printed, as tables to be read next to one's own.

from encore.lab.studies.published_servers import published_tables
for table in published_tables():
    print(table.as_markdown())
"""

from encore.lab.scaling.printed_tables import DELL
from encore.results.published.published import load_figures
from encore.results.table import Table

# Places of the study with figures that a table of ours is compared with, in its order.
PLACES = (
    ("slide: time to accuracy", "Published: time to the target"),
    ("slide: PCIe and SXM2", "Published: PCIe and SXM2, one GPU"),
    ("slide: precision", "Published: single against mixed precision"),
    ("slide: framework comparison", "Published: frameworks"),
    ("slide: GPU kernels", "Published: kernels in common"),
    ("slide: GPU scaling", "Published: scaling efficiency"),
    ("slide: NVLink bridge", "Published: NVLink"),
    ("slide: key messages", "Published: NVLink, key messages"),
    ("backup: memory sizes", "Published: batch variants"),
)


def published_tables() -> list[Table]:
    found = []
    for place, title in PLACES:
        rows = tuple(
            (
                figure.model, figure.system, figure.gpus, figure.batch, figure.precision,
                figure.quantity.replace("_", " "), f"{figure.relation} {figure.printed}".removeprefix("= "),
                figure.unit, figure.context,
            )
            for figure in load_figures()
            if figure.source == DELL and figure.place == place
        )  # fmt: skip
        columns = ("benchmark", "system", "GPUs", "batch", "precision", "figure", "printed", "unit", "context")
        found.append(Table(title=title, columns=columns, rows=rows, note=f"{DELL}, {place}."))
    return [table for table in found if table.rows]
