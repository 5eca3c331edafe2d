"""One-off studies, as scripts: `python -m quill.loadtest.studies.affinity --help`, for instance."""
