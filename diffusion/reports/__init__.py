"""One way to make pages, tables and figures: templates, and the functions that compute what they show."""
