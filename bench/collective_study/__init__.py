"""One measured point of a collective, and what is made of many: tables, plots, fits."""
