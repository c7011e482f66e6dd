"""The timeout of collectives: what each rank remembers, the watcher that compares it, and the report before the end."""
