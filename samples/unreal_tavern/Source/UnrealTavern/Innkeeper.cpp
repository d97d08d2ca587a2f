#include "Innkeeper.h"

#include "Components/StaticMeshComponent.h"
#include "Engine/StaticMesh.h"
#include "UObject/ConstructorHelpers.h"

#include "FrameshardNpcComponent.h"

AInnkeeper::AInnkeeper()
{
	RootComponent = Shape(TEXT("Body"), TEXT("/Engine/BasicShapes/Cone.Cone"), FVector(0, 0, 80), FVector(0.9, 0.9, 1.6));
	Shape(TEXT("Head"), TEXT("/Engine/BasicShapes/Sphere.Sphere"), FVector(0, 0, 60), FVector(0.5, 0.5, 0.4));
	Shape(TEXT("Bar"), TEXT("/Engine/BasicShapes/Cube.Cube"), FVector(-90, 0, -30), FVector(0.8, 3, 0.6));

	Npc = CreateDefaultSubobject<UFrameshardNpcComponent>(TEXT("Npc"));
	Npc->Params.Conversation = TEXT("mira");
	Npc->Params.Persona = TEXT("You are Mira, the innkeeper of the Gilded Tankard, a warm tavern in a mountain village. You "
							   "speak to a traveller. You answer in character, in three or four friendly sentences.");
	Npc->Params.MaxTokens = 100;
	Npc->Params.Temperature = 0.6;
}

UStaticMeshComponent* AInnkeeper::Shape(
	const TCHAR* Part, const TCHAR* Mesh, const FVector& Place, const FVector& Size)
{
	UStaticMeshComponent* Made = CreateDefaultSubobject<UStaticMeshComponent>(Part);
	ConstructorHelpers::FObjectFinder<UStaticMesh> Found(Mesh);
	Made->SetStaticMesh(Found.Object);
	if (RootComponent)
	{
		Made->SetupAttachment(RootComponent);
	}
	Made->SetRelativeLocation(Place);
	Made->SetRelativeScale3D(Size);
	return Made;
}
