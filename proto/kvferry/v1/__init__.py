"""Generated messages and services of `kvferry.v1`; the `.proto` files beside are the source, `make proto` regenerates.

Compatibility: fields and methods are only ever added. A number is never used again, a meaning never changes;
new meaning is a new field. Receivers ignore what they do not know and say so in errors, never in silence
where a request would be answered differently.
"""
