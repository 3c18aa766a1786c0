// A client that oapi-codegen generates from the gateway's OpenAPI document: chat, embeddings, models, errors.
package main

import (
	"context"
	"fmt"
	"os"

	"client/api"
)

func check(holds bool, what string) {
	if !holds {
		fmt.Println("does not hold:", what)
		os.Exit(1)
	}
}

func must[T any](value T, err error) T {
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	return value
}

func main() {
	url, model, ctx := os.Args[1], os.Args[2], context.Background()
	client := must(api.NewClientWithResponses(url))
	models := must(client.ListModelsWithResponse(ctx, nil))
	check(models.JSON200.Data[0].Id == model, "the model is listed")

	var content api.MessageParam_Content
	must(0, content.FromMessageParamContent0("Is it sunny in Paris?"))
	limit := 8
	body := api.ChatRequest{
		Model:     &model,
		Messages:  []api.MessageParam{{Role: "user", Content: &content}},
		MaxTokens: &limit,
	}
	answer := must(client.CreateChatCompletionWithResponse(ctx, nil, body))
	check(answer.JSON200 != nil, string(answer.Body))
	check(answer.JSON200.Choices[0].Message.Content != nil, "chat has text")

	other := "other"
	body.Model = &other
	refused := must(client.CreateChatCompletionWithResponse(ctx, nil, body))
	check(refused.JSON404 != nil && refused.JSON404.Error.Code == "model_not_found", "an unknown model is refused")
}
