# Agency while nothing moves the states: the plain GPT, to the last bit

question = "Does agency cost anything while every head is active?"

mechanisms = ["agency"]
