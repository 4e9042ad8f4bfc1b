"""The bundled small model."""
