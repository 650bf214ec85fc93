"""The questions that are asked when no others are given."""

PROMPTS = (
    "What is the capital of Australia?",
    "Tell me a very short story about a lighthouse.",
    "How do I boil an egg so that the yolk stays soft?",
    "Count from one to ten.",
    "Why is the sky blue?",
    "Give me three tips against stage fright.",
    "What is the difference between weather and climate?",
    "Say good night in a friendly way.",
    "How far away is the moon?",
    "Explain what a prime number is to a child.",
    "Which instruments are in a string quartet?",
    "Recommend something to cook with tomatoes and rice.",
    "What did the Romans use concrete for?",
    "Describe the smell of rain in two sentences.",
    "How many minutes are there in a week?",
    "Read me this address: 221B Baker Street, London.",
)
