"""Generation: where the samples of a run come from, and how new weights get there.

base.py is `Generation`; in_process.py has that of engine = local, which shares the trainer's weights, and that of stored texts
(--preferences, or --data with sft). Other engines are features of plug-ins (ludic/run/features/engines.py names their classes).
teachers.py scores samples with a teacher.
"""
