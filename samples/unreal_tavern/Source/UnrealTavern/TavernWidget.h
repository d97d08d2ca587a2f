#pragma once

#include "Blueprint/UserWidget.h"
#include "CoreMinimal.h"
#include "Types/SlateEnums.h"

#include "FrameshardTypes.h"

#include "TavernWidget.generated.h"

class UEditableTextBox;
class UFrameshardNpcComponent;
class USlider;
class UTextBlock;

/** What is said, a line to type in, and a slider for the VRAM that Mira may hold. Made in code, without an asset. */
UCLASS()
class UTavernWidget : public UUserWidget
{
	GENERATED_BODY()

public:
	/** Call it once, before the widget is shown. */
	void Listen(UFrameshardNpcComponent* Speaker);

protected:
	virtual bool Initialize() override;

private:
	UFUNCTION()
	void Type(const FText& Text, ETextCommit::Type How);
	UFUNCTION()
	void Hear(const FString& Token);
	UFUNCTION()
	void Fail(const FString& Message, int32 Code);
	UFUNCTION()
	void Move(float Part);
	UFUNCTION()
	void Change(const FFrameshardBudget& Budget);

	UPROPERTY()
	UFrameshardNpcComponent* Npc = nullptr;
	UPROPERTY()
	UTextBlock* Answer = nullptr;
	UPROPERTY()
	UEditableTextBox* Question = nullptr;
	UPROPERTY()
	USlider* Slider = nullptr;
	UPROPERTY()
	UTextBlock* Vram = nullptr;

	FString Said;
};
