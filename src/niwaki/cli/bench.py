"""``niwaki bench``."""

from typing import Annotated

from niwaki.cli.common import in_session, out, record_file, written
from niwaki.cli.options import Model, RecordFile, options
from niwaki.cli.screen import Screen
from niwaki.cli.tables import speed_table
from niwaki.files import replace_file
from niwaki.options import Compute


@options(without=("tf32", "max_memory"))
def bench(
    model: Model,
    prompt_tokens: Annotated[int, "N"] = 128,
    tokens: Annotated[int, "N"] = 32,
    repeats: Annotated[int, "N"] = 3,
    compute: Compute = Compute(),
    record: RecordFile = None,
) -> None:
    """Measure how fast MODEL generates text and how much memory and disk space it takes, dense and packed.

    Whichever form is missing is made in the temporary directory (TMPDIR) and removed afterwards.

    Example: niwaki bench MODEL

    Options:
        prompt_tokens: Tokens in the prompt.
        tokens: Tokens to generate.
        repeats: Number of runs; the median is shown.

    More options:
        record: JSON file for the results; 'niwaki report' shows those in MODEL/niwaki-bench.json.
    """
    with Screen(f"measuring {model}") as screen, in_session():
        from niwaki.evaluation.bench import bench as run

        file = record_file(record, "speeds")
        speed = run(
            model, prompt_tokens=prompt_tokens, tokens=tokens, repeats=repeats, compute=compute, progress=screen
        )
    out.print(speed_table(speed))
    screen.line(speed.conditions())
    if file is not None:
        replace_file(file, speed.to_json())
        written(file)
