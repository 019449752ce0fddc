"""Is a backend exact on this model, and do its samples stay apart?"""
