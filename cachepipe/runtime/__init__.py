"""What a service imports: the entry, the recorder and the hooks; torch is loaded lazily."""
