"""The report: one HTML file with metrics, charts and the timeline, readable without a network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from verl_async.config import TrainJob
from verl_async.job import resolved
from verl_async.report.cards import build_cards
from verl_async.report.metric_charts import metric_charts
from verl_async.report.output_folder import config_yaml
from verl_async.report.timeline_charts import timeline_charts, timeline_legend

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl_async.config import SftJob
    from verl_async.orchestrator.timeline import Span
    from verl_async.report.output_folder import OutputFolder
    from verl_async.report.record import RunRecord


def write_report(
    folder: OutputFolder,
    job: TrainJob | SftJob,
    record: RunRecord,
    spans: Sequence[Span],
    summary: Mapping[str, Any],
) -> None:
    """Write ``report.html``.

    Args:
        folder: where to.
        job: the resolved job.
        record: what the run reported; may be empty.
        spans: what each actor did when; may be empty.
        summary: as `build_summary` made it.

    Raises:
        OutputError: it cannot be written.
    """
    folder.write_text(folder.report, render_report(job, record, spans, summary))


def render_report(job: TrainJob | SftJob, record: RunRecord, spans: Sequence[Span], summary: Mapping[str, Any]) -> str:
    """Return the page as HTML; arguments as for `write_report`."""
    pages = Environment(
        loader=PackageLoader("verl_async", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return pages.get_template("report.html.jinja").render(
        title="Fully-async RL training" if isinstance(job, TrainJob) else "Supervised training",
        model=str(job.model.path),
        summary=summary,
        cards=build_cards(summary, record),
        charts=metric_charts(record),
        timelines=timeline_charts(spans),
        timeline_legend=timeline_legend(spans),
        config=config_yaml(resolved(job)),
    )
