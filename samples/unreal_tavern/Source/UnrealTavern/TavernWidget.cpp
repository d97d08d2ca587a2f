#include "TavernWidget.h"

#include "Blueprint/WidgetTree.h"
#include "Components/EditableTextBox.h"
#include "Components/Slider.h"
#include "Components/TextBlock.h"
#include "Components/VerticalBox.h"
#include "Engine/GameInstance.h"

#include "FrameshardNpcComponent.h"
#include "FrameshardSubsystem.h"

namespace
{
constexpr double LeastMb = 512;
constexpr double MostMb = 4096;
}

bool UTavernWidget::Initialize()
{
	if (!Super::Initialize() || Answer)
	{
		return false;
	}
	UVerticalBox* Box = WidgetTree->ConstructWidget<UVerticalBox>();
	WidgetTree->RootWidget = Box;
	Answer = WidgetTree->ConstructWidget<UTextBlock>();
	Answer->SetAutoWrapText(true);
	Question = WidgetTree->ConstructWidget<UEditableTextBox>();
	Question->SetHintText(FText::FromString(TEXT("Say something to Mira, then Enter")));
	Slider = WidgetTree->ConstructWidget<USlider>();
	Slider->SetValue(1);
	Vram = WidgetTree->ConstructWidget<UTextBlock>();
	Box->AddChildToVerticalBox(Answer);
	Box->AddChildToVerticalBox(Question);
	Box->AddChildToVerticalBox(Slider);
	Box->AddChildToVerticalBox(Vram);
	return true;
}

void UTavernWidget::Listen(UFrameshardNpcComponent* Speaker)
{
	Npc = Speaker;
	Npc->OnTokenGenerated.AddDynamic(this, &UTavernWidget::Hear);
	Npc->OnError.AddDynamic(this, &UTavernWidget::Fail);
	Question->OnTextCommitted.AddDynamic(this, &UTavernWidget::Type);
	Slider->OnValueChanged.AddDynamic(this, &UTavernWidget::Move);
	UFrameshardSubsystem* Sidecar = GetGameInstance()->GetSubsystem<UFrameshardSubsystem>();
	Sidecar->OnError.AddDynamic(this, &UTavernWidget::Fail);
	Sidecar->OnBudgetChanged.AddDynamic(this, &UTavernWidget::Change);
}

void UTavernWidget::Type(const FText& Text, ETextCommit::Type How)
{
	if (How == ETextCommit::OnEnter && !Text.IsEmpty())
	{
		Said = TEXT("");
		Npc->Ask(Text.ToString());
		Question->SetText(FText());
	}
}

void UTavernWidget::Hear(const FString& Token)
{
	Said += Token;
	Answer->SetText(FText::FromString(Said));
}

void UTavernWidget::Fail(const FString& Message, int32)
{
	Answer->SetText(FText::FromString(Message));
}

void UTavernWidget::Move(float Part)
{
	GetGameInstance()->GetSubsystem<UFrameshardSubsystem>()->SetVramBudget(LeastMb + Part * (MostMb - LeastMb));
}

void UTavernWidget::Change(const FFrameshardBudget& Budget)
{
	Vram->SetText(FText::Format(FText::FromString(TEXT("VRAM: {0} of {1} MiB")), FText::AsNumber(int64(Budget.UsedMb)),
		FText::AsNumber(int64(Budget.BudgetMb))));
}
