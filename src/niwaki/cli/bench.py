"""``niwaki bench``."""

from typing import Annotated

from typer import Option

from niwaki.cli.common import in_session, out, written
from niwaki.cli.options import Model, spread
from niwaki.cli.screen import Screen
from niwaki.cli.tables import speed_table
from niwaki.files import write_json
from niwaki.options import Compute
from niwaki.records.record import SPEED_NAME

RecordFile = Annotated[
    str | None,
    Option("--record", metavar="FILE", help=r"\[default: niwaki-bench.json in a MODEL of niwaki's, for its report]"),
]


@spread(without=("tf32", "memory"))
def bench(
    model: Model,
    prompt: Annotated[int, Option("--prompt-tokens", metavar="N", help="Tokens of the prompt.")] = 128,
    tokens: Annotated[int, Option(metavar="N", help="Tokens to write after it.")] = 32,
    repeats: Annotated[int, Option(metavar="N", help="Repetitions; the median is shown.")] = 3,
    compute: Compute = Compute(),
    record: RecordFile = None,
) -> None:
    """Measure how fast MODEL writes and how much memory and disk it takes: dense, and packed if it is pruned.

    The form that is not there is made in the temporary directory (TMPDIR), for as long as it takes.
    """
    with Screen(f"measuring {model}") as screen, in_session():
        from niwaki.evaluation.bench import bench as run
        from niwaki.models.locate import locate_model
        from niwaki.runs.workplace import check_record

        if record is None and ((directory := locate_model(model)) / "niwaki.json").is_file():
            record = str(directory / SPEED_NAME)
        file = None if record is None else check_record(record, "speeds")
        speed = run(model, prompt=prompt, tokens=tokens, repeats=repeats, compute=compute, progress=screen)
    out.print(speed_table(speed))
    screen.line(speed.conditions())
    if file is not None:
        write_json(file, speed.to_json())
        written(file)
