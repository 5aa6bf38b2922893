"""Chooses the pages to attend to, jointly over a layer's key heads."""
