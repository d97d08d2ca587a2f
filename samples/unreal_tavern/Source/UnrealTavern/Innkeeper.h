#pragma once

#include "CoreMinimal.h"
#include "GameFramework/Actor.h"

#include "Innkeeper.generated.h"

class UFrameshardNpcComponent;
class UStaticMeshComponent;

/** Mira, made of the engine's own shapes. What she says comes from her component. */
UCLASS()
class AInnkeeper : public AActor
{
	GENERATED_BODY()

public:
	AInnkeeper();

	UPROPERTY(VisibleAnywhere, Category = "Tavern")
	UFrameshardNpcComponent* Npc = nullptr;

private:
	UStaticMeshComponent* Shape(const TCHAR* Part, const TCHAR* Mesh, const FVector& Place, const FVector& Size);
};
