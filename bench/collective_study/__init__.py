"""Results of collectives: measured, read, tabled, drawn and fitted.

``measuring`` measures one call by all transports and defines the row of a result; ``memory`` limits its size.
``results`` reads and checks a file of rows, ``tables`` prints and draws rows, and ``piecewise`` fits alpha and beta to
them.
"""
