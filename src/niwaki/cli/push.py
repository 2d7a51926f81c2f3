"""``niwaki push``."""

from typing import Annotated

from niwaki.cli.common import in_session, out
from niwaki.cli.options import options
from niwaki.cli.screen import Screen


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
