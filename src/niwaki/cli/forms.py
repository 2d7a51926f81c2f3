"""The commands that write a model in another form: pack, unpack, export, push and report."""

from typing import Annotated

from typer import Option

from niwaki.choices import ExportFormat
from niwaki.cli.common import in_session, out, quiet_libraries, written
from niwaki.cli.options import Model, Output, options
from niwaki.cli.screen import Screen
from niwaki.files import given_path
from niwaki.options import Calibration, Compute
from niwaki.records.wording import size

#: Whatever the case of its letters, which only typer's own option can say.
Format = Annotated[
    ExportFormat,
    Option(
        "--format",
        case_sensitive=False,
        help="compressed-tensors: integers of 2 to 8 bits; w8a8, fp8: 8 bits for inputs too; packed: as 'niwaki pack' "
        "writes; gguf-...: for llama.cpp.",
    ),
]


@options()
def pack(model: Model, output: Output) -> None:
    """Store MODEL compactly in OUT, without its zeros and with weights in only as many bits as they have.

    MODEL is pruned or quantized. 'niwaki generate' runs the result, and 'niwaki unpack' restores MODEL.

    Example: niwaki pack MODEL OUT
    """
    with Screen(f"packing {model}", output=output) as screen, in_session():
        from niwaki.packed.pack import pack as run

        sizes = run(model, output, screen)
    for line in sizes.described:
        out.print(line)
    written(output)


@options()
def unpack(model: Model, output: Output) -> None:
    """Turn a packed MODEL back into the dense one it was made from, byte for byte, and write that to OUT.

    Only products of two factors are computed again, which may change their last digits.

    Example: niwaki unpack PACKED OUT

    Options:
        model: A directory that 'niwaki pack' wrote.
    """
    with Screen(f"unpacking {model}", output=output) as screen, in_session():
        from niwaki.packed.pack import unpack as run

        run(model, output, screen)
    written(output)


@options()
def export(model: Model, output: Output, form: Format = "compressed-tensors") -> None:
    """Write MODEL in another format: GGUF for llama.cpp and Ollama, packed integers for vLLM and transformers.

    Example: niwaki export MODEL model.gguf --format gguf-q8_0

    Options:
        output: Output directory, new or empty; or for llama.cpp a file that ends in .gguf.
    """
    with Screen(f"exporting {model}", output=output) as screen, in_session():
        from niwaki.exports.export import export as run

        for note in run(model, output, form, screen):
            screen.note(note)
    written(output)


@options(without=("tf32", "max_memory"))
def imatrix(
    model: Model,
    new_file: Annotated[str, "FILE"],
    calibration: Calibration = Calibration(),
    compute: Compute = Compute(),
) -> None:
    """Write an importance matrix of MODEL, for llama.cpp's own llama-quantize.

    Files that niwaki makes for llama.cpp need none: see 'niwaki compress --for llama.cpp'.

    Example: niwaki imatrix MODEL imatrix.gguf --calibration text.txt

    Options:
        new_file: The file, such as imatrix.gguf; it must not exist.
    """
    with Screen(f"reading {model}") as screen, in_session():
        from niwaki.exports.imatrix import importance_matrix as run

        for note in run(model, new_file, calibration, compute=compute, progress=screen):
            screen.note(note)
    written(new_file)


@options()
def push(
    directory: Annotated[str, "DIR"],
    name: Annotated[str, "OWNER/NAME"],
    private: bool = False,
    base_model: Annotated[str | None, "OWNER/NAME"] = None,
    dry_run: bool = False,
) -> None:
    """Publish DIR on the Hugging Face hub as the model OWNER/NAME, with your login.

    All files are listed first and then uploaded in one commit: weights, model card, record and recipe.

    Example: niwaki push OUT OWNER/NAME --dry-run

    Options:
        directory: A directory that niwaki wrote, in any format.
        name: Name of the new model on the hub.
        private: Make the model private.
        base_model: Hub id of the original model, if you gave it as a local directory; 'none' if it is not on the hub.
        dry_run: List what would be uploaded, and upload nothing.
    """
    with Screen(f"reading {directory}", stopped="stopped: nothing was published") as screen, in_session():
        from niwaki.cli.tables import files_table
        from niwaki.exports.push import Publication

        publication = Publication(directory, name, base_model)
        with screen.above():
            out.print(files_table(publication.files))
        for note in publication.notes:
            screen.note(note)
        if dry_run:
            return
        screen.status(f"uploading to {name}")
        url = publication.upload(private)
    out.print(f"published at {url}", soft_wrap=True, markup=False)


@options()
def report(
    directory: Annotated[str, "DIR"],
    file: Annotated[str | None, "FILE", "-o", "--output"] = None,
    prompts: Annotated[list[str] | None, "TEXT", "--prompt"] = None,
    figures: Annotated[str | None, "DIR"] = None,
    samples: bool = True,
) -> None:
    """Write a report on a model that niwaki made, or on a comparison, as one self-contained HTML file.

    Example: niwaki report OUT

    Options:
        directory: Output directory of 'niwaki compare', or of a command that made a model.
        file: HTML file to write. [default: DIR/report.html]
        prompts: Prompt for the text samples; may be repeated.
        figures: Also write each chart to this directory, as SVG and PDF.
        samples: Show text that the original and the new model generate.
    """
    from niwaki.reports.page import report as write

    with Screen(f"drawing {directory}") as screen:
        if (given_path(directory) / "niwaki.json").is_file():  # a model, from which masks and text are
            quiet_libraries()
        asked = (prompts or None) if samples else []
        path = write(directory, file, prompts=asked, figures=figures, progress=screen)
    screen.line(f"written to {path} ({size(path.stat().st_size)})")
    if figures:
        screen.line(f"figures written to {figures}")
