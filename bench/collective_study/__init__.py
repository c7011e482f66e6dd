"""Results of collectives: measured, read, tabled, drawn and fitted.

``measuring`` measures one call by all transports and defines the row of a result; ``memory`` limits its size.
``comparable`` says which rows count, ``results`` reads and checks a file of rows, and ``tables`` prints and draws rows.
``piecewise`` fits alpha and beta to the sizes of a series, and ``fitted_series`` makes a model, tables and a plot.
"""
