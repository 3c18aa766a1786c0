"""Step planning: sequences, scheduler, step budget, admission, sampling plan, batch slots, graph capture sizes.

Pure: no torch, no threads, no asyncio; the simulator runs the same modules. Scheduling decisions belong here. This
package must not depend on where pages are stored or how a step is executed.
"""
