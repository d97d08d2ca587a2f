#include "TavernGameMode.h"

#include "Engine/PointLight.h"
#include "Engine/World.h"
#include "GameFramework/PlayerController.h"

#include "Innkeeper.h"
#include "TavernWidget.h"

void ATavernGameMode::BeginPlay()
{
	Super::BeginPlay();
	UWorld* World = GetWorld();
	AInnkeeper* Mira = World->SpawnActor<AInnkeeper>(FVector(400, 80, 60), FRotator::ZeroRotator);
	World->SpawnActor<APointLight>(FVector(200, -100, 300), FRotator::ZeroRotator);

	APlayerController* Player = World->GetFirstPlayerController();
	UTavernWidget* Widget = CreateWidget<UTavernWidget>(Player, UTavernWidget::StaticClass());
	Widget->Listen(Mira->Npc);
	Widget->AddToViewport();
	Player->SetShowMouseCursor(true);
	Player->SetInputMode(FInputModeUIOnly());
}
