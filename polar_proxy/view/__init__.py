"""The web pages: the records of a database, from the overview down to one token.

Pages are Jinja2 templates (`templates/`), rendered by the server; small ES modules (`assets/`) add live updates,
keyboard shortcuts and the token view. Without scripts all pages but the token view can be read. Each file in `pages/`
serves one kind of page, with its routes in `add_routes`: lists.py (overview and lists), run.py (rollout, session and
call), tokens.py, groups.py, comparison.py, training.py. remarks.py and export.py answer the forms of the pages.
`router.py` joins the routes and adds the common parts; access.py decides who may see the pages. To add a page, write a
file in `pages/` and a template that extends `base.html`, and name the file in `router.py`. `report.py` writes a run as
one file.
"""

from polar_proxy.view.router import create_view_router
from polar_proxy.view.server import serve_pages

__all__ = ["create_view_router", "serve_pages"]
