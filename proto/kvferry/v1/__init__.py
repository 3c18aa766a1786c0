"""Messages and services of `kvferry.v1`, generated from the `.proto` files in this folder by `make proto`.

Compatibility: fields and methods are only added. A number is never reused, and the meaning of a field never changes; a
new meaning is a new field. Receivers ignore unknown fields, and reject unknown values that would change the answer.
"""
