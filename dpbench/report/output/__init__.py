"""Writes a report: tables, the page of all figures, their files."""

import jinja2

#: Pages, each one file that loads nothing else. Every text is escaped, but for files of this folder and `safe` ones.
PAGES = jinja2.Environment(loader=jinja2.PackageLoader(__name__, ""), autoescape=True, undefined=jinja2.StrictUndefined)
